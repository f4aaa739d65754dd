"""The small networks of the paper, which no library ships."""
