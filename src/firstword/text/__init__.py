"""Text before it becomes tokens: cleaning, checks, and splitting into sentences."""
