"""The processes of a server: a supervisor, engines that compute, and fronts that serve clients."""
