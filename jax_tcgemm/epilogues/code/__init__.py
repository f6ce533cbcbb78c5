"""Code of an elementwise function for one element: expression graph, places, and emission."""
