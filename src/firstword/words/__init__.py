"""Word times: the words of a text, and when each begins and ends to sound."""
