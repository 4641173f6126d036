"""Cost model of a training layout, from shapes and data sheets: a roofline of operators, links and memory. No torch."""
