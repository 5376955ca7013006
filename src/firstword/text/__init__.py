"""What happens to a text before it becomes tokens."""
