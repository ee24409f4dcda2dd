// (to be filled)
