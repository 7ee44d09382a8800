"""Evidence: the role of each array of a state, and its source.

An array may be stored with loss only if there is evidence of its role (`Evidence`). In this order:

    kind         `Kind`, the answer in one word; look-up of what the caller gave as `kinds=`; reasons in files
    module       `kinds(module, optimizer)`: what a torch module and its optimizers say
    names        what path and shape alone say, such as the layer type and places that never hold weights
    entries      entries of optimizers, in every layout that occurs, and the arrays that they belong to
    moments      which entries are first and second moments, and which of them must stay exact
    gather       all of these together, for `compress`
"""
