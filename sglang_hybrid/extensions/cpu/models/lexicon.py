"""Words and word parts from which the tokenizer of the tiny models is made.

Nothing here is a corpus: it is a list of everyday English words, the endings that turn them into
other words, and the sounds from which further syllables are put together.
"""

from __future__ import annotations

from collections.abc import Iterator


def _words(text: str) -> list[str]:
    return text.split()


FUNCTION_WORDS = """
a about above across after again against all almost alone along already also although always am
among an and another any anyone anything are around as at away back be because been before behind
being below between both but by can cannot could did do does doing done down during each either
else enough even ever every everyone everything except few first for from further gave get give
given go goes going gone got had has have having he her here hers herself him himself his how
however i if in indeed instead into is it its itself just last least less let like likely made make
many may maybe me might mine more most much must my myself near nearly neither never next no nobody
none nor not nothing now of off often on once one only onto or other others our ours out outside
over own per perhaps quite rather really said same says see seem seen several shall she should
since so some someone something sometimes soon still such than that the their theirs them themselves
then there therefore these they thing things this those though through thus to together too toward
under unless until up upon us use used very was way we well went were what whatever when where
whether which while who whole whom whose why will with within without would yes yet you your yours
yourself
"""

STEMS = """
able absence accept access accident account accuse achieve acid act active actor actual adapt add
address adjust admire admit adopt adult advance advice affair affect afford afternoon age agency
agent agree aid aim air airport alarm album alert alive allow alter amount analysis ancient angle
angry animal announce annual answer anxiety apart appeal appear apple apply approach approve april
argue arise arm army arrange array arrest arrive art article artist ask aspect assert assess asset
assign assist assume assure attach attack attempt attend attention attract audience august author
autumn average avoid award aware baby balance ball band bank bar bare barrier base basic basis
basket batch battle beach bear beat beautiful bed begin behave belief believe bell belong bench
bend benefit best better beyond big bill bind bird birth bit bite bitter black blame blank block
blood bloom blow blue board boat body bold bone bonus book boost boot border born borrow boss
bother bottle bottom bound bowl box boy brain branch brand brave bread break breath breed brick
bridge brief bright bring broad broken brother brown browse brush budget buffer bug build bundle
burden burn bus business busy butter button buy cabin cable cache cake calculate call calm camera
camp campaign cancel candidate capable capacity capital captain capture car carbon card care career
careful cargo carry case cash cast castle cat catch category cause cell center central century
certain chain chair chairman challenge chamber chance change channel chapter character charge chart
chase cheap check cheese chemical chest chicken chief child choice choose church circle cite city
civil claim class classic clause clean clear clerk clever click client climate climb clock clone
close cloth cloud club clue coach coal coast coat code coffee cold collapse collect college color
column combine come comfort command comment commit common community compact company compare compete
compile complain complete complex compose compute concept concern conclude concrete condition
conduct conference confirm conflict confuse connect consider consist constant construct consult
consume contact contain content contest context continue contract contrast control convert cook
cool copper copy core corn corner correct cost cotton council count country county couple courage
course court cousin cover cow crack craft crash cream create credit crew crime crisis critic crop
cross crowd crown crucial cry culture cup cure curious current curve custom customer cut cycle
daily damage dance danger dare dark data database date daughter day dead deal dear death debate
debt decade decide declare decline decode deep default defeat defend define degree delay delete
deliver demand democracy deny depart depend deposit depth derive describe desert deserve design
desire desk despair destroy detail detect determine develop device dialog diet differ difficult dig
digit dinner direct dirt disk display distance distinct district divide doctor document dog dollar
domain door double doubt draft drag drama draw dream dress drink drive driver drop drug dry due
duration dust duty eager ear early earn earth ease east easy eat economy edge edit editor educate
effect effort egg eight elect electric element embed emerge emit emotion employ empty enable encode
encounter end enemy energy engage engine enhance enjoy ensure enter entire entry envelope equal
equip error escape establish estate estimate evening event evict evidence evil evolve exact examine
example exceed excellent exchange excite exclude excuse execute exercise exist exit expand expect
expense expert explain exploit explore export express extend extra extreme eye fabric face fact
factor factory fail fair faith fall false fame family famous fan far farm fashion fast fat fate
father fault favor fear feature federal fee feed feel female fence fetch fever field fight figure
file fill film filter final find fine finger finish fire firm fish fit five fix flag flame flash
flat flavor fleet flesh flight float flood floor flour flow flower fluid fly focus fold folder folk
follow food foot force foreign forest forget fork form formal format former formula fort fortune
forward found four frame free freeze fresh friend front fruit fuel full fun function fund funny
furniture fuse future gain game gap garden gas gate gather gender gene general generate gentle
genuine ghost giant gift girl glad glass global glory goal god gold good govern grace grade gradual
grain grand grant graph grass grave gray great green greet grid grief ground group grow growth
guard guess guest guide guilt gun habit hair half hall hand handle hang happen happy harbor hard
harm harvest hash hat hate head health hear heart heat heavy height hello help herb hero hidden
hide high hill hint hire history hit hold hole holiday hollow home honest honor hope horizon horse
hospital host hot hotel hour house huge human humor hundred hunger hunt hurry hurt husband hybrid
ice idea ideal identify idle ignore image imagine impact implement imply import impose impress
improve include income increase index indicate individual industry infant infer influence inform
initial injury inner innocent input inquire insert inside insist inspect inspire install instance
instant institute instruct insult intend intent interest internal internet interpret interval
introduce invent invest invite involve iron island issue item iterate jacket january jazz job join
joint joke journal journey joy judge juice july jump june junior jury keen keep kernel key kick kid
kill kind king kitchen knee knife knock know label labor lack ladder lady lake lamp land lane
language large late latency latest laugh launch law lawyer layer lead leader leaf league learn
leather leave lecture left leg legal legend lemon length lesson letter level liberty library
license life lift light limit line linear link lion lip liquid list listen liter little live load
loan local locate lock logic lonely long look loop loose lord lose loss lost loud love lovely low
loyal luck lunch machine magic mail main maintain major male manage manner map march margin mark
market marry mask mass master match material math matrix matter maximum meal mean measure meat
media medical meet member memory mental mention menu mercy merge message metal meter method middle
midnight mild mile military milk mill mind minimum minister minor minute mirror miss mission
mistake mix mode model modern modest module moment money monitor month mood moon moral morning
mother motion motor mountain mouse mouth move movie murder muscle museum music mutual mystery name
narrow nation native natural nature navy neat neck need negative neighbor nerve nest net network
neutral new news nice night nine noble node noise normal north nose note notice novel november
nuclear number nurse object observe obtain obvious occasion occupy occur ocean october odd offer
office officer oil old open opera operate opinion oppose option orange orbit order ordinary organ
origin output oven overall owe owner pace pack package page pain paint pair pale panel panic paper
parallel parent park parse part particular partner party pass passage passion past patch path
patient pattern pause pay peace peak pen people pepper percent perfect perform period permit person
phase phone photo phrase physical piano pick picture piece pilot pipe pitch place plain plan plane
planet plant plastic plate platform play player please plenty plot plug plus pocket poem poet point
poison police policy polite political pool poor popular port portion position positive possess
possible post pot potato pound power practice praise pray precise predict prefer prefix prepare
presence present preserve president press pressure pretend pretty prevent price pride priest prime
prince print prior prison private prize problem proceed process produce product profit program
progress project promise promote prompt proof proper propose protect protocol proud prove provide
public publish pull pulse punish pupil purchase pure purple purpose push quality quantity quarter
queen query quest question queue quick quiet quit quote race radio rail rain raise random range
rank rapid rare rate ratio raw reach react read ready real reason recall receive recent recipe
record recover recurrent red reduce refer reflect reform refuse regard region register regret
regular reject relate relax release relevant relief rely remain remark remember remind remote
remove render rent repair repeat replace reply report request require rescue research reserve
resist resolve resort resource respect respond rest restore result retain retire return reveal
review revise reward rhythm rice rich ride right ring rise risk rival river road rock role roll
roof room root rope rough round route routine row royal rule run rural rush sacred sad safe sail
salad salary sale salt sample sand save scale scan scene schedule scheme scholar school science
scope score screen script sea search season seat second secret section sector secure seed seek
segment select self sell send senior sense sentence separate september sequence series serious
serve server service session set settle seven severe shadow shake shape share sharp sheet shelf
shell shelter shift shine ship shirt shock shoe shoot shop shore short shot shoulder shout show
shower shut sick side sight sign signal silence silk silver similar simple sing single sink sister
site situation six size skill skin sky slave sleep slice slide slight slip slope slow small smart
smell smile smoke smooth snake snow social society soft software soil soldier solid solution solve
son song sort soul sound soup source south space spare spark speak special specific speech speed
spell spend sphere spirit split sport spot spread spring square stable stack staff stage stair
stand standard star stare start state statement station statistic status stay steady steal steam
steel step stick stock stomach stone stop storage store storm story straight strange stranger
stream street strength stress stretch strict strike string strip strong structure struggle student
study stuff style subject submit succeed success sudden suffer sugar suggest suit sum summary
summer sun supper supply support suppose surface surprise surround survey survive suspect sweet
swim switch symbol system table tail take tale talent talk tall target task taste tax tea teach
teacher team tear technical technique telephone television tell temper temple ten tend tensor tenth
term test text thank theme theory thick thin think third thirty thought thousand thread threat
three throat throw thumb thunder ticket tide tie tight time tiny tip tire title toast tobacco today
toe token tomorrow tone tongue tonight tool tooth top topic total touch tour tower town trace track
trade tradition traffic train transfer transform translate transport travel treat treaty tree trend
trial tribe trick trigger trip troop trouble truck true trust truth try tube tune turn twelve
twenty twice twin twist two type typical ugly uncle undo uniform union unique unit universe
university unknown update upper urban urge usage user usual valid valley value variable variety
various vary vast vector vehicle venture verb verify version vessel victim victory video view
village violent virtue visible vision visit visual vital voice volume vote wage wait wake walk wall
want war warm warn wash waste watch water wave weak wealth weapon wear weather web wedding week
weigh weight welcome west wheat wheel white wide wife wild win wind window wine wing winner winter
wire wisdom wise wish witness woman wonder wood word work worker world worry worse worth wound
write writer wrong yard year yellow yesterday yield young youth zero zone
"""

SUFFIXES = _words(
    "s ed ing er ly ers ness ment able ful less ion al ive ity ist ism ize y en es or ory ship "
    "ward hood like ish ance ence ation 's ability ingly ically"
)

PREFIXES = _words("un re pre dis over under out inter sub non mis anti auto multi super counter")

ONSETS = _words(
    "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr qu sh sl sm sp st str "
    "sw th tr"
)
NUCLEI = _words("a e i o u ai ea ee oa ou")
CODAS = ["", *_words("b d g k l m n p r s t ck ld nd ng nt rd rk rn rt sh st th")]

CODE = _words(
    "() {} [] () => -> == != <= >= += -= *= /= && || :: // /* */ \"\" '' ... .. -- ++ ## ### --- "
    '``` """ <|  |> </ /> (" ") (\'  \') [" "] ); (); ): ), ]. ], }, :// .com .py _id __'
)


CONTRACTIONS = _words("'s 't 're 've 'm 'll 'd")

LETTERS = list("abcdefghijklmnopqrstuvwxyzéèêëàâáäåöôóòüúùñçíîïßæø°§£×±µ")


def common_words() -> Iterator[str]:
    """All words of the lists above, function words first."""
    yield from _words(FUNCTION_WORDS)
    yield from _words(STEMS)


def derived_words() -> Iterator[str]:
    """Stems with endings and beginnings, roughly as English spells them."""
    stems = _words(STEMS)
    for suffix in SUFFIXES:
        for stem in stems:
            yield _join(stem, suffix)
    for prefix in PREFIXES:
        for stem in stems:
            yield prefix + stem


def syllables() -> Iterator[str]:
    """Every combination of an onset, a nucleus and a coda."""
    for coda in CODAS:
        for nucleus in NUCLEI:
            for onset in ONSETS:
                yield onset + nucleus + coda


def _join(stem: str, suffix: str) -> str:
    """``stem`` and ``suffix`` in one word: ``make`` and ``ing`` give ``making``."""
    if stem.endswith("e") and suffix[0] in "aeio":
        return stem[:-1] + suffix
    if stem.endswith("y") and suffix in ("s", "ed", "er", "es") and stem[-2] not in "aeiou":
        return stem[:-1] + ("ies" if suffix in ("s", "es") else "i" + suffix)
    if stem.endswith(("s", "x", "z", "ch", "sh")) and suffix == "s":
        return stem + "es"
    return stem + suffix
