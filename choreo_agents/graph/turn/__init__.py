"""One call of one node: what it sees is read, put in place and encoded, then it speaks."""
