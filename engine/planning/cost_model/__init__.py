"""What a layout costs, from shapes and data sheets alone: a roofline of operators, links, memory. No torch."""
