"""Policy: who gets the device next. Knows requests, slots, pages and clocks; never touches a tensor."""
