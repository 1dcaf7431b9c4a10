"""Files of elements and small texts, each read and written here without the program that it belongs to."""
