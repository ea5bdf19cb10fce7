"""Plans for unequal devices: the levels of ResiHP, the joint optimum, Malleus, AdaPtis."""
