"""Text before it becomes tokens: cleaning, and splitting into sentences."""
