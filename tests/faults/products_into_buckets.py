"""Faults of products that add to flat buckets, and of parameters that are gathered bucket by bucket."""

from tests.faults.fault import Fault

_PRODUCTS = "tests/zero/reduce/test_bucket_gradient.py"
_ADAM = "tests/zero/optim/test_fused_adam.py"

PRODUCTS_INTO_BUCKETS = (
    Fault(
        name="product-added-twice",
        about="A weight gradient is added to its bucket by the product and once more by autograd.",
        file="kernels/ops/linear.py",
        old="    main.end(node)\n    return True\n",
        new="    main.end(node)\n    return False\n",
        tests=(f"{_PRODUCTS}::test_sums_are_those_of_autograd",),
    ),
    Fault(
        name="gradient-beside-products-forgotten",
        about="What an embedding gives to the weight that it shares with its head replaces the head's product.",
        file="zero/reduce/reducer.py",
        old="        if opened.holds:\n",
        new="        if False:\n",
        tests=(f"{_PRODUCTS}::test_sums_are_those_of_autograd",),
    ),
    Fault(
        name="told-before-all-uses",
        about="A bucket is sent when the first of a weight's two products is added, so the second one is missing.",
        file="zero/reduce/reducer.py",
        old="        if node is None:\n            self._sums.complete(self.name)",
        new="        if True:\n            self._sums.complete(self.name)",
        tests=(f"{_PRODUCTS}::test_a_weight_of_several_uses_is_told_after_all_of_them",),
    ),
    Fault(
        name="complete-although-a-gradient-arrives",
        about="A bucket is sent while the gradient that a weight has beside its products is still to be added.",
        file="zero/reduce/reducer.py",
        old="            product.forget()\n        _check_gathered",
        new="            product.all_done()\n        _check_gathered",
        tests=(f"{_PRODUCTS}::test_another_use_that_no_product_has_may_come_later",),
    ),
    Fault(
        name="product-onto-a-stale-sum",
        about="The first product of a step is added to what the step before has left in the bucket.",
        file="kernels/ops/linear.py",
        old="fresh=not opened.holds",
        new="fresh=False",
        tests=(f"{_PRODUCTS}::test_sums_are_those_of_autograd",),
    ),
    Fault(
        name="products-alone-tell-nobody",
        about="A weight of several products is never told, so its bucket and all behind it wait for the step's end.",
        file="zero/reduce/reducer.py",
        old="                product.all_done()\n",
        new="                product.forget()\n",
        tests=(f"{_PRODUCTS}::test_a_weight_of_several_uses_is_told_after_all_of_them",),
    ),
    Fault(
        name="hook-without-a-gradient",
        about="A hook of the user's on a weight is not called, because a product has taken its gradient.",
        file="zero/reduce/reducer.py",
        old="        if parameter._backward_hooks:\n",
        new="        if False:\n",
        tests=(f"{_PRODUCTS}::test_hooks_of_the_users_see_their_gradient_and_the_log_says_so_once",),
    ),
    Fault(
        name="bucket-gathered-before-its-update",
        about="The gather of a bucket is started before its update, so data ranks go on with each other's old weights.",
        file="zero/optim/flat_optimizers.py",
        old="        for number, chosen in enumerate(order.sets):\n",
        new="        for number, chosen in enumerate(order.sets):\n            order.updated(number)\n",
        tests=(f"{_ADAM}::test_a_bucket_is_gathered_before_the_next_one_is_updated",),
    ),
    Fault(
        name="gathered-after-all-updates",
        about="The first gather waits for the update of the last bucket, so nothing hides it.",
        file="zero/optim/sharded_optimizer.py",
        old="UpdateOrder(self._bucket_tensors, None",
        new="UpdateOrder([sum(self._bucket_tensors, ()), *[()] * (len(self._buckets) - 1)], None",
        tests=(f"{_ADAM}::test_a_bucket_is_gathered_before_the_next_one_is_updated",),
    ),
    Fault(
        name="narrow-weights-written-on-a-skipped-step",
        about="A step that is skipped overwrites the weights that the user has written since the last update.",
        file="zero/optim/sharded_optimizer.py",
        old="            self._step_inner(rounded=True)\n",
        new="            self._step_inner(rounded=False)\n",
        tests=(f"{_ADAM}::test_a_skipped_step_writes_no_narrow_weight",),
    ),
)
