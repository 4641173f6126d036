"""The cost model beside published figures, and the fit of its factors."""
