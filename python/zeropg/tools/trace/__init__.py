"""`python -m zeropg trace`: what ZEROPG_TRACE recorded, as a table, for Chrome's viewer, and as a page."""
