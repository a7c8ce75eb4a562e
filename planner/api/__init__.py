"""What `planner` offers to Python, function by function; `planner/__init__.py` lists the names."""
