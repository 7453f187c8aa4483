"""Communication between the ranks of a layer."""
