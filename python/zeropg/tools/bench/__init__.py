"""`python -m zeropg bench`: figures beside a peer's of the same run, proven before they are timed."""
