"""Lets ranks share the computation of each layer: a plan, the parts of parameters, the sums between them."""
