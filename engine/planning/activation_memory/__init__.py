"""Memory of activations: storages counted while they live, and a walk over the actions of a rank."""
