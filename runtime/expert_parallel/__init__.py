"""Lets ranks have different experts of a mixture: a plan, the exchange of tokens, parts of parameters."""
