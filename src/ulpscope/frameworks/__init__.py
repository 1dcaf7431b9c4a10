"""The seam to the frameworks. Only below this folder is torch or mindspore imported."""
