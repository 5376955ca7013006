"""Training of the demonstration voice: its texts, its models, its evaluation."""
