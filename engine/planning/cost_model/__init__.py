"""What a layout costs, from shapes and data sheets alone: a roofline for each operator class, links, memory. No torch."""
