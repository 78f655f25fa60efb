def lichen_soak_minutes(skeins: int, lichen: str, vinegar_spoons: int) -> int:
    """Compute how many minutes wool must soak in a lichen dye vat.

    Args:
        skeins: Number of wool skeins placed in the vat.
        lichen: Name of the lichen the dye is made from, in lower case.
        vinegar_spoons: Number of spoons of vinegar stirred into the vat.
    """
    pigment = {
        "oakmoss": 17,
        "crottle": 29,
        "orchil": 8,
        "lungwort": 41,
        "cudbear": 13,
        "usnea": 36,
    }
    minutes = 23 + 7 * skeins + 3 * pigment.get(lichen, 19)
    if vinegar_spoons > skeins:
        minutes += 11 * (vinegar_spoons - skeins)
    return minutes - vinegar_spoons % 5
