"""Whether simulated engines take as long as real ones: debates on one engine and over two, beside what is foretold."""
