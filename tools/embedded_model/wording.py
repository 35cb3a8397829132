"""The words that captions are made of: frames, adjectives, quality words, backgrounds, everyday names.

Whatever ends in ``_HELD_OUT`` never occurs in training; the text encoder is tested on it.
"""


def _lines(text: str) -> list[str]:
    return text.split("\n")


def _words(text: str) -> list[str]:
    return text.split()


# {a}: the subject with its article; {n}: without
FRAMES = (
    ["{a}"] * 22
    + ["{n}"] * 14
    + _lines("""a photo of {a}
a photo of {a}
a picture of {a}
a picture of {a}
an image of {a}
a photograph of {a}
photo of {a}
picture of {a}
image of {a}
photo of {n}
picture of {n}
a close-up photo of {a}
a close up of {a}
a 3d render of {a}
3d render of {a}
a render of {a}
a 3d model of {a}
a 3d icon of {a}
an icon of {a}
an emoji of {a}
the emoji of {a}
an illustration of {a}
illustration of {a}
a drawing of {a}
drawing of {a}
a cartoon of {a}
cartoon of {a}
a sticker of {a}
a logo of {a}
clipart of {a}
clip art of {a}
digital art of {a}
a portrait of {a}
a studio photo of {a}
a product photo of {a}
{n} emoji
{n} icon
{n} picture
{n} photo
{n} drawing
{n} sticker
{n} illustration
{n} clipart
{n} 3d render
{n} in 3d
{n} isolated
{a} in the center
{a} in the middle
{a}, centered
{a}, close up
here is {a}
this is {a}
there is {a}
i want {a}
i would like {a}
draw {a}
please draw {a}
draw me {a}
show me {a}
make {a}
create {a}
generate {a}
generate an image of {a}
make a picture of {a}
a view of {a}
a picture with {a}
an image with {a}
an image showing {a}
a picture that shows {a}
{a} as an emoji
emoji: {n}
icon: {n}
{a} by itself
just {a}
only {a}
a rendering of {a}
a graphic of {a}
a figure of {a}
a toy of {a}
a plastic {n}""")
)

FRAMES_HELD_OUT = _lines("""a painting of {a}
an oil painting of {a}
a sketch of {a}
a watercolor of {a}
can you paint {a} for me
look at {a}
{n} artwork
what {a} looks like
my favourite picture: {a}
a rendition of {a}
concept art of {a}
a depiction of {a}, please""")

ADJECTIVES = _words("""cute small big little large tiny huge shiny glossy beautiful pretty lovely nice
funny cool cartoon simple colorful colourful 3d adorable new single detailed
realistic stylized modern smooth bright vivid great wonderful amazing perfect
clean real giant round soft sweet friendly classic plain typical normal ordinary
fresh elegant fancy""")

ADJECTIVES_HELD_OUT = _words("gorgeous charming miniature splendid polished delightful attractive enormous")

QUALITY = _lines("""masterpiece
best quality
high quality
highly detailed
very detailed
detailed
4k
8k
hd
high resolution
ultra detailed
sharp focus
sharp
digital art
3d
3d render
octane render
cinematic lighting
studio lighting
soft lighting
professional
award winning
trending on artstation
beautiful
cute
colorful
vibrant colors
vivid colors
simple
minimalist
clean
isolated
centered
no background
close-up
photorealistic
realistic
photo
illustration
icon
emoji
fluent design
unreal engine
intricate
smooth
glossy
cartoon
cartoon style
plain
a great picture
very good
absurdres
raw photo
dslr
bokeh
depth of field
hdr""")

QUALITY_HELD_OUT = ["ultra hd wallpaper", "stunning", "top quality", "very aesthetic", "sharp details", "uhd"]

# whole captions that name nothing, as negative prompts do: the picture drawn with them is unconditional
NEGATIVE = _lines("""blurry
low quality
worst quality
bad quality
lowres
bad anatomy
bad hands
extra fingers
missing fingers
deformed
ugly
disfigured
mutated
watermark
text
signature
jpeg artifacts
out of focus
grainy
noise
cropped
low resolution
poorly drawn
error
username
artifacts
distorted
monochrome
grayscale
duplicate
normal quality
blurred
pixelated
dull
messy""")

# {c}: caption so far; {k}: the colour
BACKGROUND_FRAMES = (
    ["{c} on a {k} background"] * 8
    + ["{c}, {k} background"] * 6
    + _lines("""{c} on {k} background
{c} with a {k} background
{c} with {k} background
{c} against a {k} background
{c} in front of a {k} background
{c} over a {k} background
{c} on a plain {k} background
{c} on a solid {k} background
{c}, solid {k} background
{c}, plain {k} background
{c}, simple {k} background
{c}, {k} backdrop
{c} on a {k} backdrop
{c} against a {k} wall
{c} in front of a {k} wall
{c} on {k}
{c}, on {k}
{c} {k} background
{c}, the background is {k}
{c} and the background is {k}
{c}, {k} colored background
{c} with {k} in the background
{c} set on a {k} background
on a {k} background, {c}
on a {k} background {c}
{k} background, {c}
a {k} background with {c}
{c} background {k}
{c}, bright {k} background""")
)

BACKGROUND_FRAMES_HELD_OUT = _lines("""{c}, background colour: {k}
{c} before a {k} backdrop
{c} placed on a uniform {k} background
{c}, all {k} background
a wall of {k} behind {c}""")

OBJECT_COLOUR_FRAMES = ["{k} {n}"] * 12 + _lines("""{n} that is {k}
{n} which is {k}
{n} in {k}
{n} colored {k}
{k} colored {n}
bright {k} {n}
{n} of {k} color
{n}, {k}""")

DISTRACTORS = [
    "on a {o}",
    "with a {o}",
    "next to a {o}",
    "in a {o}",
    "near a {o}",
    "and a {o}",
    "beside the {o}",
    "under a {o}",
]

# everyday words for pictures whose labels are longer, by label
EVERYDAY = {
    "automobile": ["car", "red car", "motor car"],
    "racing car": ["race car", "sports car", "formula one car"],
    "red apple": ["apple"],
    "hibiscus": ["flower"],
    "deciduous tree": ["tree"],
    "evergreen tree": ["pine tree", "fir tree"],
    "sailboat": ["boat", "sailing boat"],
    "airplane": ["plane", "aeroplane", "jet"],
    "locomotive": ["steam train", "steam engine", "steam locomotive"],
    "bicycle": ["bike"],
    "motorcycle": ["motorbike"],
    "red heart": ["heart"],
    "crescent moon": ["moon"],
    "open book": ["book"],
    "mobile phone": ["phone", "smartphone", "cell phone"],
    "laptop": ["laptop computer", "computer", "notebook computer"],
    "alarm clock": ["clock"],
    "watch": ["wristwatch"],
    "running shoe": ["shoe", "sneaker"],
    "top hat": ["hat"],
    "t-shirt": ["shirt"],
    "hot beverage": ["cup of coffee", "coffee", "hot coffee", "cup of tea", "coffee cup"],
    "beer mug": ["beer", "glass of beer"],
    "wine glass": ["wine", "glass of wine"],
    "birthday cake": ["cake"],
    "soft ice cream": ["ice cream cone"],
    "hamburger": ["burger", "cheeseburger"],
    "french fries": ["fries", "chips"],
    "pizza": ["slice of pizza", "pizza slice"],
    "watermelon": ["slice of watermelon", "watermelon slice"],
    "grinning face": ["smiley", "smiley face", "happy face", "smile"],
    "crying face": ["sad face"],
    "angry face": ["mad face"],
    "smiling face with sunglasses": ["cool face", "face with sunglasses"],
    "rocket": ["rocket ship", "space rocket"],
    "flying saucer": ["ufo", "spaceship", "alien spaceship"],
    "t-rex": ["tyrannosaurus", "tyrannosaurus rex"],
    "sauropod": ["dinosaur", "brontosaurus"],
    "honeybee": ["bee"],
    "lady beetle": ["ladybug", "ladybird"],
    "ewe": ["sheep"],
    "snow-capped mountain": ["snowy mountain"],
    "beach with umbrella": ["beach"],
    "cityscape": ["city", "city skyline"],
    "camping": ["tent"],
    "bridge at night": ["bridge"],
    "high voltage": ["lightning", "lightning bolt"],
    "fire": ["flame"],
    "wrapped gift": ["gift", "present", "gift box"],
    "soccer ball": ["football", "ball"],
    "sports medal": ["medal", "gold medal"],
    "musical keyboard": ["piano", "keyboard instrument"],
    "locked": ["lock", "padlock"],
    "crossed swords": ["swords"],
    "dagger": ["sword", "knife"],
    "money bag": ["money", "bag of money"],
    "gem stone": ["diamond", "gem", "jewel"],
    "handbag": ["bag"],
    "sunglasses": ["dark glasses"],
    "light bulb": ["lightbulb", "lamp"],
    "couch and lamp": ["sofa", "couch"],
    "envelope": ["letter", "mail"],
    "package": ["box", "cardboard box", "parcel"],
    "delivery truck": ["truck", "lorry"],
    "articulated lorry": ["semi truck"],
    "passenger ship": ["cruise ship"],
    "baby angel": ["angel"],
    "mage": ["wizard"],
    "santa claus": ["santa", "father christmas"],
    "raised hand": ["hand"],
    "bust in silhouette": ["silhouette"],
    "teddy bear": ["teddy", "plush bear", "stuffed bear"],
    "jack-o-lantern": ["pumpkin", "halloween pumpkin"],
    "game die": ["dice", "die"],
    "trophy": ["cup trophy", "gold trophy", "golden trophy"],
    "video game": ["game controller", "gamepad"],
    "bullseye": ["target", "dartboard"],
    "artist palette": ["paint palette", "palette"],
    "television": ["tv", "tv set"],
    "magnifying glass tilted left": ["magnifying glass", "magnifier"],
    "telephone": ["old phone", "red telephone"],
    "doughnut": ["donut"],
    "poultry leg": ["chicken leg", "drumstick"],
    "cooking": ["fried egg"],
    "steaming bowl": ["bowl of noodles", "ramen", "noodles"],
    "cooked rice": ["rice", "bowl of rice"],
    "cheese wedge": ["cheese"],
    "ear of corn": ["corn", "maize"],
    "hot pepper": ["chili pepper", "chili"],
    "green salad": ["salad"],
    "glass of milk": ["milk"],
    "honey pot": ["honey", "jar of honey"],
    "tropical drink": ["cocktail", "drink"],
    "cup with straw": ["soda", "soft drink"],
    "kiwi fruit": ["kiwi"],
    "baguette bread": ["baguette"],
    "ice cream": ["bowl of ice cream", "sundae"],
    "house with garden": ["house with a garden"],
    "classical building": ["temple", "museum"],
    "ferris wheel": ["big wheel"],
    "fire engine": ["fire truck"],
    "police car": ["cop car"],
    "taxi": ["cab"],
    "speedboat": ["fast boat", "motorboat"],
    "ringed planet": ["planet", "saturn"],
    "globe showing europe-africa": ["earth", "globe", "planet earth"],
    "glowing star": ["shining star"],
    "droplet": ["water drop", "drop of water"],
    "water wave": ["wave", "ocean wave"],
    "woman's hat": ["sun hat"],
    "graduation cap": ["mortarboard"],
    "billed cap": ["baseball cap", "cap"],
    "high-heeled shoe": ["high heel", "stiletto"],
    "woman's boot": ["boot"],
    "musical note": ["music note"],
    "pen": ["ballpoint pen"],
    "balance scale": ["scales"],
    "wastebasket": ["trash can", "bin"],
    "thread": ["spool of thread"],
    "police officer": ["cop", "policeman"],
    "health worker": ["doctor", "nurse"],
    "cook": ["chef"],
    "dog": ["puppy", "pup"],
    "cat": ["kitten", "kitty"],
    "rabbit": ["bunny"],
    "baby chick": ["chick"],
    "horse": ["pony"],
    "crown": ["king's crown", "golden crown"],
    "sun": ["sunshine"],
    "candy": ["sweet"],
    "robot": ["robot head", "robot face"],
    "ghost": ["spook"],
    "skull": ["skull head"],
    "alien": ["alien head"],
    "ship": ["big ship"],
}
