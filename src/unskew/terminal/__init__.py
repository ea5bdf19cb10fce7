"""What `unskew run` and `unskew watch` show in the terminal."""
