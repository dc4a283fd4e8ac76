"""What callbacks are told of a call: what it reads, in words, and what it says, as it comes."""
