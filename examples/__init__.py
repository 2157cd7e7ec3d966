"""Methods of papers, written as one would write one's own."""
