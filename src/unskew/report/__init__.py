"""A run as one HTML file, to be sent to somebody who has nothing of Unskew."""
