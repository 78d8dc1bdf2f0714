"""What devices can do, and how long an op takes on them. No torch in here."""
