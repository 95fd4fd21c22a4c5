"""A folder of its own: everything here runs in processes that have an emulated GPU."""
