"""PML as it is written: its tree, how it is read and checked, and how it is written again."""
