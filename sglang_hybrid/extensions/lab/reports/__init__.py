"""Tables, plots and the page of a replay."""
