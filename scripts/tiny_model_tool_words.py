"""The names of tools, and questions for tools, that the tiny chat model learns, and a function that draws names."""

import random
from typing import NamedTuple

from tiny_model_text import WORDS, split_phrases, split_words


class Vocabulary(NamedTuple):
    """Names of a tool and of its parameters: first names for training, then names never used in training."""

    tools: tuple[str, ...]
    new_tools: tuple[str, ...]
    parameters: tuple[str, ...]
    new_parameters: tuple[str, ...]

    def draw(self, rng: random.Random, is_new: bool, num_parameters: int = 1) -> tuple[str, list[str]]:
        """Draws a tool's name, sometimes with a meaningless word, and the names of its parameters; names that belong
        together share an entry, separated by commas.

        Half of the time it returns the first names, which the model must know without copying.
        """
        if is_new:
            return rng.choice(self.new_tools), rng.choice(self.new_parameters).split(",")[:num_parameters]
        keys = self.parameters[0] if rng.random() < 0.5 else rng.choice(self.parameters)
        name = self.tools[0] if rng.random() < 0.5 else rng.choice(self.tools)
        if rng.random() < 0.25:
            word = rng.choice(WORDS)
            name = f"{word}_{name}" if rng.random() < 0.5 else f"{name}_{word}"
        return name, keys.split(",")[:num_parameters]


WEATHER = Vocabulary(
    split_words(
        "get_weather get_weather weather get_current_weather current_weather weather_report fetch_weather getWeather "
        "lookup_weather check_weather getCurrentWeather get_forecast weather_forecast"
    ),
    split_words("find_weather weather_now todays_weather"),
    split_words("city city location location place town city_name where"),
    split_words("area spot city_or_town"),
)
CLOCK = Vocabulary(
    split_words("get_time time get_current_time current_time getTime clock_time local_time time_in"),
    split_words("find_time time_now"),
    split_words("city location place timezone zone town"),
    split_words("area spot"),
)
NUMBERS = split_words("a,b a,b x,y first,second left,right num1,num2 n1,n2 number1,number2 i,j")
NEW_NUMBERS = split_words("p,q one,other value1,value2")
ADDING = Vocabulary(
    split_words("add add sum add_numbers addition plus get_sum add_two_numbers addNumbers"),
    split_words("add_up sum_of adder"),
    NUMBERS,
    NEW_NUMBERS,
)
MULTIPLYING = Vocabulary(
    split_words("multiply multiply times product multiply_numbers mul"), split_words("multiplier"), NUMBERS, NEW_NUMBERS
)
SUBTRACTING = Vocabulary(
    split_words("subtract subtract minus difference subtract_numbers sub"),
    split_words("subtraction"),
    NUMBERS,
    NEW_NUMBERS,
)
DIVIDING = Vocabulary(
    split_words("divide divide quotient divide_numbers div"), split_words("division"), NUMBERS, NEW_NUMBERS
)
CALCULATING = Vocabulary(
    split_words("calculator calculator calculate calc evaluate compute math eval_expression"),
    split_words("calculate_it arithmetic"),
    split_words("expression expression expr formula input"),
    split_words("calculation sum"),
)
SEARCHING = Vocabulary(
    split_words("search search web_search search_web find lookup search_docs"),
    split_words("search_all finder"),
    split_words("query query q text keywords topic"),
    split_words("words about"),
)
THINGS = split_words(
    "price population capital size age height distance score colour status balance address email phone number owner "
    "author speed temperature length weight name population price"
)
ABOUT_THINGS = Vocabulary(
    split_words("get_{} get_{} {} {}_of lookup_{} find_{} fetch_{} get_{}_of"),
    split_words("read_{} {}_for"),
    split_words("name item city country id key user product symbol subject"),
    split_words("what object"),
)
WEATHER_ASKED = split_phrases(
    "What is the weather in {}?|What is the weather in {}?|What's the weather in {}?|How is the weather in {}?|"
    "Weather in {}?|What is the weather like in {}?|What's the weather like in {} today?|Tell me the weather in {}.|"
    "Is it raining in {}?|Is it sunny in {}?|How warm is it in {}?|What's the weather like in {} right now?|"
    "Check the weather in {}.|What will the weather be in {} tomorrow?|Please tell me the weather in {}.|"
    "How's the weather in {}?|What is the temperature in {}?|Will it rain in {}?|weather {}"
)
TIME_ASKED = split_phrases(
    "What time is it in {}?|What is the time in {}?|Time in {}?|Tell me the time in {}.|What's the time in {}?|"
    "What is the current time in {}?"
)
TIME_HERE = split_phrases("What time is it?|What is the time?|Tell me the time.|What's the time?|What time is it now?")
MORE_CITIES = split_phrases(
    "New York|San Francisco|Los Angeles|Hong Kong|Rio de Janeiro|Mexico City|Shanghai|Singapore|Sydney|Moscow|Toronto|"
    "Chicago|Boston|Dublin|Lisbon|Munich|Zurich|Mumbai|Nairobi|Amsterdam|Prague|Warsaw|Athens|Istanbul"
)
MULTIPLIED = split_phrases(
    "What is {} * {}?|{} * {}|{} times {}|What is {} times {}?|Multiply {} and {}.|Multiply {} by {}.|What is {} x {}?|"
    "How much is {} * {}?|What is the product of {} and {}?|What's {}*{}?"
)
SUBTRACTED = split_phrases(
    "What is {} - {}?|{} - {}|{} minus {}|What is {} minus {}?|How much is {} - {}?|What's {}-{}?"
)
DIVIDED = split_phrases("What is {} / {}?|{} / {}|{} divided by {}|What is {} divided by {}?|Divide {} by {}.")
CALCULATED = split_phrases(
    "What is {}?|What is {}?|Calculate {}.|{}|How much is {}?|Compute {}.|{} =|What's {}?|Evaluate {}.|"
    "Please calculate {}"
)
SEARCHED = split_phrases(
    "Search for {}.|Search the web for {}.|Look up {}.|Find {}.|Please search for {}.|Search: {}|Can you search for {}?"
)
THINGS_ASKED = split_phrases(
    "What is the {} of {}?|What is the {} of {}?|Get the {} of {}.|Tell me the {} of {}.|Find the {} of {}.|"
    "What's the {} of {}?|Look up the {} of {}.|What is the {} for {}?|Show me the {} of {}."
)
SKIES = split_words("sunny cloudy rainy windy foggy snowy clear stormy warm cold")
