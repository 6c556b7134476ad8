"""Hosts on this machine, with slow links between them."""
