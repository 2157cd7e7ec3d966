"""Single clients of a run: one that withdraws, and what each of them contributes.

Both rest on `Method.forget`, which removes a client from the server's state in closed form. What
cannot be removed is named, never passed over.
"""
