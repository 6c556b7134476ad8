"""How one optimizer step is applied to the flat ranges that a rank owns: updaters with one interface.

All show their state in `state`, the dictionary that the user sees as `optimizer.state`.
"""
