"""What a decode may sample, and what its tokens say."""
