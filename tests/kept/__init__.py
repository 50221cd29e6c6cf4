"""Files that released versions have written: every later version reads them."""
