"""What training frameworks do that no row says: by their date, by a recipe, by habit."""
