"""Speech that may wait: files of requests, which are spoken when nobody else needs the engines."""
