"""How weights are held: in which dtype, quantised, laid out for the CPU."""
