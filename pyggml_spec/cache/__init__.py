"""What persists between steps: K/V rows, the recurrent state, and the cursor that says which of it counts."""
