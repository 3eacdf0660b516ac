"""Shards units over a part of the ranks, such as those of a node, and joins the parts in a second hop."""
