"""Several engines that answer for one trainer."""
