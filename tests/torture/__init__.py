"""What goes on for as long as one likes: processes that are killed, and a reader who forgets nothing."""
