"""What is said in a graph, as text to encode: what agents are told, and thoughts; and its entries in state."""
