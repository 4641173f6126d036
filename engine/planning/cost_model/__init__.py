"""Cost of a layout, from shapes and data sheets alone: a roofline of operators, links, memory. No torch."""
