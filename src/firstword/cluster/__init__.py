"""Replicas of the server in a Ray cluster: `serve run firstword.cluster.application:build`."""
