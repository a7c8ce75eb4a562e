"""Factor rules, layouts on meshes, and what lies between two layouts."""

__all__: list[str] = []
