"""reasoning-gym's categories as the BroRL paper reports them (Table 5).

A category is the package's module of that name. Not in any: ``coin_flip``, the only task of "probability", which the
paper does not report; tasks that are left out by name; tasks whose items depend on Python's hash seed.
"""

from __future__ import annotations

CATEGORIES: dict[str, tuple[str, ...]] = {
    name: tuple(tasks.split())
    for name, tasks in {
        "algebra": """complex_arithmetic intermediate_integration polynomial_equations simple_equations
            simple_integration""",
        "algorithmic": """ab base_conversion binary_alternation binary_matrix caesar_cipher count_primes cryptarithm
            game_of_life game_of_life_halting graph_color group_anagrams jugs letter_counting letter_jumble
            manipulate_matrix number_filtering number_sorting palindrome_generation palindrome_partitioning pool_matrix
            rotate_matrix rotten_oranges sentence_reordering spell_backward spiral_matrix string_insertion
            string_manipulation string_splitting string_synthesis word_sequence_reversal word_sorting""",
        "arc": "arc_1d arc_agi rearc",
        "arithmetic": """basic_arithmetic bitwise_arithmetic calendar_arithmetic chain_sum count_bits decimal_arithmetic
            decimal_chain_sum dice fraction_simplification gcd gsm_symbolic lcm leg_counting number_format
            power_function prime_factorization products time_intervals""",
        "code": "bf codeio",
        "cognition": """color_cube_rotation figlet_font modulo_grid needle_haystack number_sequence rectangle_count
            rubiks_cube""",
        "games": """boxnet countdown emoji_mystery futoshiki kakurasu mahjong_puzzle maze mini_sudoku n_queens puzzle24
            rush_hour sokoban sudoku survo tower_of_hanoi tsumego""",
        "geometry": "advanced_geometry simple_geometry",
        "graphs": "course_schedule family_relationships largest_island path_star quantum_lock shortest_path",
        "induction": "acre list_functions",
        "logic": "aiw circuit_logic knights_knaves self_reference syllogism zebra_puzzles",
    }.items()
}
_OF = {task: name for name, tasks in CATEGORIES.items() for task in tasks}
_ELSEWHERE = {  # usable one by one, see above
    "isomorphic_strings": "algorithmic",
    "knight_swap": "games",
    "polynomial_multiplication": "algebra",
    "ransom_note": "algorithmic",
    "word_ladder": "algorithmic",
}


def category(task: str) -> str:
    """The category that a task is reported under; "other" for what the paper does not report."""
    return _OF.get(task) or _ELSEWHERE.get(task, "other")
